"""The learner: recurrent, masked, factored PPO."""
