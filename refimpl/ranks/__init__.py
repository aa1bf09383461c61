"""Under `refimpl.launch`: how its ranks are started, watched and stopped."""
