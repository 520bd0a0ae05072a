//! bases
