"""What can be set: said in words, looked up without torch, and asked back where it is misspelt."""
