"""The messages of the API, one module for each .proto file, whose comments are the reference."""
