"""Export, merging and saved files of networks that grew."""
