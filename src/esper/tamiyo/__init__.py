"""The controller: policy, rule-based baselines, registry of controllers by name."""
