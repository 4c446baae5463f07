"""Jobs: everything once, in order of importance, and never before what it needs."""

from collections import Counter

from evidence.jobs import all_jobs, elsewhere
from tests.evidence.protocols import tiny

TASKS = ('["vowel"]', '["vowel", "letter"]')
TWO = (
    TASKS,
    ("rates = [1.0]", "rates = [0.5, 1.0]"),
    ("vowel = [6]", "vowel = [6, 6]"),
    ("members = 1", 'members = 1\ntasks = ["letter"]'),
)


def test_everything_can_be_done_and_nothing_is_asked_for_twice():
    jobs = all_jobs(tiny(*TWO))
    assert max(Counter(job.id for job in jobs).values()) == 1
    done, ahead = set(), jobs
    while ahead:
        ready = [job for job in ahead if done.issuperset(job.needs)]
        assert ready, [job.id for job in ahead]
        done |= {job.id for job in ready}
        ahead = [job for job in ahead if job.id not in done]


def test_controllers_come_first_then_task_by_task_then_ablations():
    jobs = all_jobs(tiny(*TWO))
    order = list(dict.fromkeys((job.kind, job.task) for job in jobs))
    assert order == [
        ("training", ""),
        ("search", ""),
        ("bandit", ""),
        ("tuning", "vowel"),
        ("counted", "vowel"),
        ("tuning", "letter"),
        ("counted", "letter"),
    ]
    last = [job.arm for job in jobs[-2:]]
    assert last == ["without-looking", "without-looking"]
    assert jobs[-1].task == "letter"
    arms = dict.fromkeys(job.arm for job in jobs if job.kind == "counted")
    assert [*arms][:3] == ["never", "tamiyo", "early"]


def test_arms_are_counted_at_the_settings_that_are_asked_for():
    left_out = 'rents_only_tasks = ["letter"]\nrents_only'
    jobs = all_jobs(tiny(*TWO, ("rents_only", left_out)))
    counted = {(j.arm, j.task, j.setting) for j in jobs if j.kind == "counted"}

    def settings(arm):
        return {(task, setting) for name, task, setting in counted if name == arm}

    # never is run once for all settings.
    assert settings("never") == {("vowel", "all"), ("letter", "all")}
    assert settings("early") == {("vowel", "low"), ("letter", "low")}
    assert settings("without-looking") == {("letter", "low")}
    assert settings("tamiyo") == {("vowel", "small"), *settings("early")}
    never = [job for job in jobs if (job.arm, job.task) == ("never", "letter")]
    assert [job.rate for job in never] == [0.5, 1.0, None]


def test_what_is_made_from_tamiyo_waits_for_it():
    jobs = {job.id: job for job in all_jobs(tiny(*TWO))}
    both = {f"counted/vowel/tamiyo/{n}/low/0" for n in (0, 1)}
    for arm in ("random", "static", "static-macs", "longer"):
        assert both <= {*jobs[f"counted/vowel/{arm}/-1/low/0"].needs}
    needs = jobs["counted/vowel/replay/1/low/0"].needs
    assert both & {*needs} == {"counted/vowel/tamiyo/1/low/0"}
    needs = jobs["counted/vowel/replay-elsewhere/0/low/0"].needs
    assert "counted/letter/tamiyo/0/low/0" in needs
    assert "tuning/vowel/replay/low/0.5" in needs
    needs = jobs["tuning/vowel/static/low/0.5"].needs
    assert set(needs) == {f"tuning/vowel/tamiyo/low/{rate}" for rate in ("0.5", "1")}
    assert jobs["tuning/vowel/tamiyo/low/1"].needs == ("training/tamiyo/0",)


def test_search_may_take_as_long_as_the_first_training():
    free = {job.id: job.needs for job in all_jobs(tiny())}
    assert free["search"] == free["bandit"] == ()
    tied = all_jobs(tiny(("search_env_steps = 90", "")))
    assert {job.id: job.needs for job in tied}["search"] == ("training/tamiyo/0",)


def test_recordings_come_from_the_next_task_with_as_many_slots():
    three = ('["vowel"]', '["vowel", "letter", "satimage"]')
    protocol = tiny(three, ("vowel = [6]", "letter = [4, 4, 4]"))
    assert elsewhere("vowel", protocol) == "satimage"
    assert elsewhere("satimage", protocol) == "vowel"
    assert elsewhere("letter", protocol) == "letter"
