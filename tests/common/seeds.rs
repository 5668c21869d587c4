// SPDX-License-Identifier: MIT OR Apache-2.0
//! Properties over drawn values: each value is made of a seed, and a failure names its seed.

use fastrand::Rng;

/// Says at which seed a property failed, however it did.
struct Named(u64);

impl Drop for Named {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("the property fails at seed {}", self.0);
        }
    }
}

/// `property` of the generators of the seeds 0 to `count - 1`. To repeat one, call it with that seed's generator alone.
pub fn each_seed(count: u64, mut property: impl FnMut(&mut Rng)) {
    for seed in 0..count {
        let _named = Named(seed);
        property(&mut Rng::with_seed(seed));
    }
}

#[test]
#[should_panic(expected = "of the fourth generator")]
fn a_failure_of_one_seed_is_a_failure() {
    let mut seen = 0;
    each_seed(5, |_| {
        seen += 1;
        assert_ne!(seen, 4, "of the fourth generator");
    });
}
