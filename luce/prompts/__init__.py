"""Beginnings of prompts that are kept, on the device, in host memory and in files."""
