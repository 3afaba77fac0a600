"""Decoding for many clients at once: requests that join and leave a running batch. torch and transformers only, no threads, no network."""
