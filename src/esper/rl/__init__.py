"""Recurrent, masked, factored PPO on any Gymnasium environment."""
