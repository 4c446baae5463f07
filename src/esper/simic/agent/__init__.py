"""From rollouts to better policies."""
