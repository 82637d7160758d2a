"""How clients come in: HTTP, event streams, WebSocket and ZeroMQ, over `actors.sessions`."""
