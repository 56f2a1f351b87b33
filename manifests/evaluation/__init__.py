"""What an evaluation receipt holds, part by part."""
