"""What a user can do, as actions with texts, keys and icons."""
