"""What a cache will hold and take, known before anything of it is written."""
