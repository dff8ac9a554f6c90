"""The GPU's own operators, in Triton. A module here imports Triton, so it is imported where a GPU is used, and not
before. Under Triton's interpreter (TRITON_INTERPRET=1) they run on a CPU, slowly: that is how they are tested."""
