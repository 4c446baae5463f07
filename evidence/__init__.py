"""Whether a learned controller pays: a protocol, a campaign, a ledger and a page."""
