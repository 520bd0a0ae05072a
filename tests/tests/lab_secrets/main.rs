//! Nothing secret leaves the daemon: through the program as it is shipped, as loud as it can be made, and through
//! its library with the cap on other crates lifted.

mod life;
mod shipped;
mod uncapped;
