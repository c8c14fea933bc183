"""From values to bytes and back: CBOR (`codec`), tensors, frames, and the messages of the RPC layer. All
cores."""
