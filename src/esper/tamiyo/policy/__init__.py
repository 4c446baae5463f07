"""From observation and masks to a decision."""
