"""The device side of a step: packing rows, running target and drafter, sizing memory."""
