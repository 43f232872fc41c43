"""The steps of `api.merging`, in their order."""
