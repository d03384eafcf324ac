"""The door: accepts what the sandbox sends, learns where it wants to go, and hands it on or refuses it."""
