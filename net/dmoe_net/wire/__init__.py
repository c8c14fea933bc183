"""Cores that turn values into bytes and back: CBOR (`codec`), tensors, frames, RPC messages and their fields."""
