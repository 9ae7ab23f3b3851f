// SPDX-License-Identifier: Apache-2.0 OR MIT
//! What processes that were killed left in the folder where ends meet.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
    net::{AddressFamily, SocketAddrUnix, SocketType},
};

/// Removes services whose process is gone, then claims whose service is. What cannot be removed stays: it does no harm but
/// to be there.
pub fn sweep(folder: &Path) -> io::Result<()> {
    let lock = fs::File::open(folder)?;
    // Who listens holds it until its socket can be told from a dead one (L-3). Whoever else sweeps does the same work.
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        return Ok(());
    }
    for file in files(folder, "sock")? {
        if is_dead(&file) {
            fs::remove_file(file)?;
        }
    }
    let claims = folder.join("claims");
    if !claims.is_dir() {
        return Ok(());
    }
    for claim in files(&claims, "waiting")?.into_iter().chain(files(&claims, "seeking")?) {
        let service = fs::read_to_string(&claim).unwrap_or_default();
        if !service.is_empty() && !folder.join(format!("{service}.sock")).exists() {
            fs::remove_file(claim)?;
        }
    }
    for contest in files(&claims, "contested")? {
        if !contest.with_extension("waiting").exists() && !contest.with_extension("seeking").exists() {
            fs::remove_file(contest)?;
        }
    }
    Ok(())
}

fn files(folder: &Path, ending: &str) -> io::Result<Vec<PathBuf>> {
    let paths = fs::read_dir(folder)?.filter_map(|entry| entry.ok().map(|entry| entry.path()));
    Ok(paths.filter(|path| path.extension().is_some_and(|found| found == ending)).collect())
}

/// A socket of another type is told apart from none at all without disturbing who listens (L-3).
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
        let _living = listen("living.sock");
        drop(listen("dead.sock"));
        for (file, service) in [
            ("a.waiting", "living"),
            ("b.waiting", "dead"),
            ("c.seeking", "dead"),
            ("b.contested", ""),
            ("a.contested", ""),
        ] {
            fs::write(at("claims").join(file), service).unwrap();
        }
        sweep(folder.path()).unwrap();
        let mut left: Vec<_> = fs::read_dir(folder.path())
            .unwrap()
            .chain(fs::read_dir(at("claims")).unwrap())
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        left.sort();
        assert_eq!(left, ["a.contested", "a.waiting", "claims", "living.sock"]);
    }
}
