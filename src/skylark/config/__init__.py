"""Configuration files: Apache's `.properties` format and the keys that Apache RocketMQ knows."""
