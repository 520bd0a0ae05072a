//! Small images made for one test.

use std::path::{Path, PathBuf};
use std::process::Command;

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

    /// An empty qcow2 at `path` over a raw file that only the host sees.
    pub fn overlay(path: &Path, backing: &str, size: &str) {
        run_ok(bounded("qemu-img").args(["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", backing]).arg(path).arg(size));
    }

    /// Whatever `qemu-img create` makes with these options, of this virtual size.
    pub fn by_qemu_img(dir: &Path, name: &str, options: &[&str], size: &str) -> Self {
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

    /// A raw image whose boot sector writes over the disk by BIOS calls, 128 MiB from 1 MiB on, and halts:
    /// a guest that needs room and no operating system.
    pub fn that_writes(dir: &Path, name: &str) -> Self {
        #[rustfmt::skip]
        const CODE: [u8; 38] = [
            0x31, 0xc0, 0x8e, 0xd8, 0x8e, 0xd0,                     // ds, ss := 0
            0xbc, 0x00, 0x7c, 0xfb,                                 // sp := 7c00, sti
            0xbe, 0x40, 0x7c, 0xb8, 0x00, 0x43, 0xcd, 0x13,         // next: extended write of the packet at 7c40
            0x66, 0x83, 0x06, 0x48, 0x7c, 0x40,                     // its sector += 64
            0x66, 0x81, 0x3e, 0x48, 0x7c, 0x00, 0x08, 0x04, 0x00,   // up to 129 MiB
            0x72, 0xe7, 0xf4, 0xeb, 0xfd,                           // jb next; halt
        ];
        // 64 sectors from 0000:7c00 to sector 2048
        const PACKET: [u8; 16] = [16, 0, 64, 0, 0x00, 0x7c, 0, 0, 0x00, 0x08, 0, 0, 0, 0, 0, 0];
        let mut image = vec![0; 1 << 20];
        image[..CODE.len()].copy_from_slice(&CODE);
        image[0x40..0x50].copy_from_slice(&PACKET);
        image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        let path = dir.join(name);
        std::fs::write(&path, image).expect("writing a scratch image");
        Self::of(path)
    }

    /// A raw image whose boot sector turns the power off by ACPI, as a guest that shuts down (q35, SeaBIOS).
    pub fn that_powers_off(dir: &Path, name: &str) -> Self {
        #[rustfmt::skip]
        const CODE: [u8; 10] = [
            0xba, 0x04, 0x06, 0xb8, 0x00, 0x20, 0xef,               // PM1a control, at 0x604 := sleep enable, S5
            0xf4, 0xeb, 0xfd,                                       // halt
        ];
        let mut image = vec![0; 1 << 20];
        image[..CODE.len()].copy_from_slice(&CODE);
        image[0x1fe..0x200].copy_from_slice(&[0x55, 0xaa]);
        let path = dir.join(name);
        std::fs::write(&path, image).expect("writing a scratch image");
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

/// Hex digest of a file, by coreutils: a library built without optimisation takes seconds for an image.
pub fn sha256_of(path: &Path) -> String {
    let mut said = run_ok(bounded("sha256sum").arg("-z").arg("--").arg(path));
    said.truncate(64);
    said
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
