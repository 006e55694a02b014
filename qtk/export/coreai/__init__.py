"""Core AI files (``.aimodel``), written and read by Apple's packages coreai-torch and coreai-core."""
