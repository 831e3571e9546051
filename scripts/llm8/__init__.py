"""What the Python programs under scripts/ share."""
