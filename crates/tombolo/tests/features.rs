// SPDX-License-Identifier: Apache-2.0 OR MIT
//! The error for an address whose backend this program was built without. `cargo xtask features` runs it with features
//! off.

use std::io::ErrorKind;

use tombolo::Error;

#[test]
fn c1_address_of_a_backend_that_is_off_says_which_feature_turns_it_on() {
    assert!(tombolo::address("local:web").is_ok());
    for (scheme, is_on) in [("vm", cfg!(feature = "vm")), ("xen", cfg!(feature = "xen"))] {
        match tombolo::address(&format!("{scheme}:1/web")) {
            Ok(address) => assert!(is_on, "{address}"),
            Err(error) => {
                let told = format!("build it with the feature \"{scheme}\" of the crate tombolo");
                assert!(!is_on && error.to_string().contains(&told), "{error}");
                assert!(matches!(&error, Error::NotBuilt { scheme: of, .. } if of == scheme), "{error:?}");
                assert_eq!(error.kind(), ErrorKind::InvalidInput);
                let connected = tombolo::connect(&format!("{scheme}:1/web"));
                assert!(matches!(connected, Err(Error::NotBuilt { .. })), "{connected:?}");
            }
        }
    }
}
