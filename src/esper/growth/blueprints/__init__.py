"""What can be planted: few forms, each at several sizes."""
