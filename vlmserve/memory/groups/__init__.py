"""What a model keeps of its tokens beside paged KV of full attention, each kind in a pool of its own."""
