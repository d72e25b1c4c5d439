"""What a rank on a GPU has beside one on a CPU: events for times, messages that streams wait for, and a guard."""
