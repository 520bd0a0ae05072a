//! kvm2-providerd.
