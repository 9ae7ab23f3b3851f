// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Removes what killed processes left in the folder where endpoints meet.

use std::{
    fs, io,
    os::unix::fs::FileTypeExt,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketType},
};
use tombolo_os::lock::try_lock_file;
use tombolo_sockets::{claim, switched};

/// Most files that are examined: a member may make any number.
const FILES: usize = 1 << 16;
/// Age below which a socket stays. Listeners take no lock here, so a young socket may be about to get its listener.
const YOUNG: Duration = Duration::from_secs(10);

/// Removes services whose process is gone, then claims whose service is gone. What cannot be removed stays; its
/// presence does no harm.
pub fn sweep(folder: &Path) -> io::Result<()> {
    switched::sweep(folder)?;
    sweep_older(folder, YOUNG)
}

fn sweep_older(folder: &Path, young: Duration) -> io::Result<()> {
    let lock = fs::File::open(folder)?;
    // Another sweeper does the same work, so this one leaves it to that. A lock that is held for long then keeps no
    // program from running.
    if !try_lock_file(&lock).unwrap_or(false) {
        return Ok(());
    }
    for file in files(folder, "sock")? {
        let is_ours = file.file_stem().and_then(|name| name.to_str()).is_some_and(claim::is_service);
        if is_ours && is_old_socket(&file, young) && is_dead(&file) {
            remove(&file);
        }
    }
    let claims = folder.join("claims");
    if !fs::symlink_metadata(&claims).is_ok_and(|found| found.is_dir()) {
        return Ok(());
    }
    for file in files(&claims, "waiting")?.into_iter().chain(files(&claims, "seeking")?) {
        let gone = |(service, _): (String, u32)| fs::symlink_metadata(folder.join(format!("{service}.sock"))).is_err();
        if claim::read(&file).is_some_and(gone) {
            remove(&file);
        }
    }
    for contest in files(&claims, "contested")? {
        let is_there = |ending| fs::symlink_metadata(contest.with_extension(ending)).is_ok();
        if !is_there("waiting") && !is_there("seeking") {
            remove(&contest);
        }
    }
    Ok(())
}

/// Removes a file. The file of another member stays.
fn remove(file: &Path) {
    let _ = fs::remove_file(file);
}

fn files(folder: &Path, ending: &str) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(folder)?.take(FILES).filter_map(|entry| entry.ok().map(|entry| entry.path()));
    Ok(paths.filter(|path| path.extension().is_some_and(|found| found == ending)).collect())
}

/// Returns whether `file` itself is a socket and old enough. A link is not followed, because it may lead to a socket
/// outside this folder.
fn is_old_socket(file: &Path, young: Duration) -> bool {
    let Ok(found) = fs::symlink_metadata(file) else { return false };
    let age = found.modified().ok().and_then(|since| since.elapsed().ok());
    found.file_type().is_socket() && age.is_some_and(|age| age >= young)
}

/// Returns whether a socket has no listener. Connecting with another socket type tells that without disturbing a
/// listener (L-3).
fn is_dead(socket: &Path) -> bool {
    let probe = rustix::net::socket(AddressFamily::UNIX, SocketType::DGRAM, None);
    let address = SocketAddrUnix::new(socket);
    probe.and_then(|probe| rustix::net::connect(&probe, &address?)) == Err(Errno::CONNREFUSED)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dead_services_and_their_claims_go_and_living_ones_stay() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("claims")).unwrap();
        let listen = |name: &str| {
            let socket = rustix::net::socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
            rustix::net::bind(&socket, &SocketAddrUnix::new(at(name)).unwrap()).unwrap();
            rustix::net::listen(&socket, 1).unwrap();
            socket
        };
        let [living, dead, young] = [1, 2, 3].map(claim::service_name);
        let socket = |service: &str| format!("{service}.sock");
        let _living = listen(&socket(&living));
        let _other = listen("other.sock");
        drop(listen(&socket(&dead)));
        // Files that members put there to be followed.
        std::os::unix::fs::symlink("other.sock", at(&socket(&claim::service_name(4)))).unwrap();
        for (file, text) in [
            ("a.waiting", &living[..]),
            ("b.waiting", &dead),
            ("c.seeking", &dead),
            ("b.contested", ""),
            ("a.contested", ""),
            ("d.waiting", "../other"),
        ] {
            fs::write(at("claims").join(file), text).unwrap();
        }
        let pipe = at("claims").join("e.waiting");
        rustix::fs::mknodat(rustix::fs::CWD, pipe, rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU, 0).unwrap();
        sweep_older(folder.path(), Duration::ZERO).unwrap();
        drop(listen(&socket(&young)));
        sweep(folder.path()).unwrap();
        let mut left: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .chain(fs::read_dir(at("claims")).unwrap())
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        let link = socket(&claim::service_name(4));
        let kept = ["a.contested", "a.waiting", "claims", "d.waiting", "e.waiting", "other.sock"].map(str::to_owned);
        let mut kept: Vec<_> = kept.into_iter().chain([socket(&living), socket(&young), link]).collect();
        kept.sort();
        assert_eq!(left, kept);
    }
}
