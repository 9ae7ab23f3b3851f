// SPDX-License-Identifier: Apache-2.0 OR MIT
//! Keeps anybody but a region's owner from writing it, once the owner's QEMU has it (B-10).
//!
//! A seal against future writing holds against everybody, also against the owner's own vhost-user backends: to these QEMU
//! passes all of the guest's memory, they map it writable, and end if they cannot. Whose memory may get such backends is
//! guarded by the rights of its file instead: the other end has it open for reading, and only root and the broker's own user
//! could open it otherwise.

/// What guards a region.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Guard {
    /// No new mapping of anybody can write it.
    Seal,
    /// Who has it open for writing may map it again; nobody else may open it so.
    Rights,
}

/// What matters here of a QEMU.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Process {
    /// The user that listened at its control socket.
    pub user: u32,
    /// Its guest's memory is shared with other processes: without that there are no vhost-user backends.
    pub is_shared: bool,
    /// A vhost-user device that it has now.
    pub backend: Option<String>,
}

/// Chooses what guards a region of the domain `owner` from the domain `reader`; none: it cannot be said yet.
///
/// # Errors
/// Nothing would; says what to do.
pub fn choose(
    owner: (&str, &Process),
    reader: (&str, Option<&Process>),
    is_reader_local: bool,
    own: u32,
) -> Option<Result<Guard, String>> {
    let ((owner, has), (reader, reads)) = (owner, reader);
    if !has.is_shared {
        return Some(Ok(Guard::Seal));
    }
    // Programs of root and of the broker's user may do what the broker may, to all memory.
    if is_reader_local {
        return Some(Ok(Guard::Rights));
    }
    let user = reads?.user;
    if user != 0 && user != own {
        return Some(Ok(Guard::Rights));
    }
    Some(match &has.backend {
        None => Ok(Guard::Seal),
        Some(device) => Err(format!(
            "{reader}'s QEMU (user {user}) could open {owner}'s memory for writing, which {owner}'s vhost-user device \
             ({device}) keeps from being sealed: run it as a user of its own"
        )),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u32 = 7;

    fn chosen(is_shared: bool, backend: Option<&str>, user: Option<u32>) -> Option<Result<Guard, String>> {
        let owner = Process { user: 64055, is_shared, backend: backend.map(String::from) };
        let reader = user.map(|user| Process { user, ..Process::default() });
        choose(("a", &owner), ("b", reader.as_ref()), false, OWN)
    }

    #[test]
    fn b10_memory_without_vhost_user_backends_is_sealed() {
        for user in [None, Some(0), Some(OWN), Some(64055)] {
            assert_eq!(chosen(false, None, user), Some(Ok(Guard::Seal)));
        }
    }

    #[test]
    fn b10_memory_that_backends_map_is_guarded_by_rights_or_not_given() {
        assert_eq!(chosen(true, Some("fs"), None), None);
        for backend in [None, Some("fs")] {
            assert_eq!(chosen(true, backend, Some(64055)), Some(Ok(Guard::Rights)));
        }
        for user in [0, OWN] {
            assert_eq!(chosen(true, None, Some(user)), Some(Ok(Guard::Seal)));
            let why = chosen(true, Some("fs"), Some(user)).unwrap().unwrap_err();
            assert!(why.starts_with("b's QEMU (user") && why.contains("(fs)"), "{why}");
        }
        let owner = Process { user: 0, is_shared: true, backend: Some("fs".into()) };
        assert_eq!(choose(("a", &owner), ("host", None), true, OWN), Some(Ok(Guard::Rights)));
    }
}
