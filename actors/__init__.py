"""Actors: thin trio shells that receive, ask the pure core what to do, and do it."""
