"""Where targets come from: a teacher behind a URL, or one in this process."""
