"""Models: an embedding, blocks of a norm, a mixer and a feedforward part, and a head for each kind of task."""
