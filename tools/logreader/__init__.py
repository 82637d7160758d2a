"""Reading the logs of a launch: records from files, the lives of requests, and how to show them."""
