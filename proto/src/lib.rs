//! The `egressproxies.provider.v1` contract.
