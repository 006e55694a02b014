"""The schemas of AIMET's encodings files, one a module: each writes and reads the record of one tensor."""
