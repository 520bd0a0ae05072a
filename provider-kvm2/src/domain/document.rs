//! The domain document (XML).
