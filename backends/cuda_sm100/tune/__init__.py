"""Schedules measured on a device: candidates, their times, and the database that the compiler replays."""
