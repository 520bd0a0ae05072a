//! Small images made for one test.

use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest as _, Sha256};

use crate::lab::{bounded, run_ok};

/// An image file and its digest.
#[derive(Debug, Clone)]
pub struct ScratchImage {
    pub path: PathBuf,
    pub sha256: String,
}

impl ScratchImage {
    /// An empty qcow2 of this virtual size, for example `4G`; a few hundred KB.
    pub fn qcow2(dir: &Path, name: &str, size: &str) -> Self {
        Self::by_qemu_img(dir, name, &["-f", "qcow2"], size)
    }

    /// A qcow2 that refers to another file, as no image may.
    pub fn with_backing_file(dir: &Path, name: &str, backing: &str) -> Self {
        Self::by_qemu_img(dir, name, &["-f", "qcow2", "-u", "-b", backing, "-F", "raw"], "16M")
    }

    fn by_qemu_img(dir: &Path, name: &str, options: &[&str], size: &str) -> Self {
        let path = dir.join(name);
        run_ok(bounded("qemu-img").args(["create", "-q"]).args(options).arg(&path).arg(size));
        Self::of(path)
    }

    /// A qcow2 whose clusters hold `mib` MiB of bytes that differ by `seed`: as large on the wire as it says.
    pub fn filled(dir: &Path, name: &str, mib: usize, seed: u64) -> Self {
        let raw = dir.join(format!("{name}.raw"));
        std::fs::write(&raw, noise(mib << 20, seed)).expect("writing a scratch image");
        let path = dir.join(name);
        run_ok(Command::new("qemu-img").args(["convert", "-q", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(&path));
        std::fs::remove_file(&raw).expect("removing a scratch file");
        Self::of(path)
    }

    fn of(path: PathBuf) -> Self {
        let sha256 = sha256_of(&path);
        Self { path, sha256 }
    }

    pub fn bytes(&self) -> Vec<u8> {
        std::fs::read(&self.path).expect("reading a scratch image")
    }
}

/// Hex digest of a file.
pub fn sha256_of(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    hex::encode(Sha256::digest(bytes))
}

/// Bytes that nothing compresses and no two seeds share (xorshift).
fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut state = (seed << 1) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn noise_has_its_length_and_depends_on_its_seed() {
        assert_eq!(noise(13, 1).len(), 13);
        assert_ne!(noise(64, 2), noise(64, 3));
    }
}
