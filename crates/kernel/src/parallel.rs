//! Work on many things of one kind by several threads.

use crate::error::Error;

/// Less is done sooner than a thread is started.
const FEW: usize = 16;

/// What `f` makes of each of `items`, in their order, by at most `workers` threads.
///
/// # Errors
/// If `f` fails for an item: the error of the first one, in this order.
pub fn map<T: Sync, R: Send, E: From<Error> + Send>(
    items: &[T],
    workers: usize,
    f: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let workers = if items.len() <= FEW { 1 } else { workers };
    spread(items, workers, f)
}

/// As [`map`], for items each of which is worth a thread.
///
/// # Errors
/// If `f` fails for an item: the error of the first one, in this order.
pub fn spread<T: Sync, R: Send, E: From<Error> + Send>(
    items: &[T],
    workers: usize,
    f: impl Fn(&T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    if workers <= 1 || items.len() <= 1 {
        return items.iter().map(f).collect();
    }
    let f = &f;
    std::thread::scope(|scope| {
        let parts = items.chunks(items.len().div_ceil(workers));
        let start = |part: &'_ [T]| part.iter().map(f).collect::<Result<Vec<R>, E>>();
        let threads: Vec<_> = parts.map(|part| scope.spawn(move || start(part))).collect();
        let mut all = Vec::with_capacity(items.len());
        for thread in threads {
            let part = thread.join();
            all.extend(part.unwrap_or_else(|_| Err(Error::Panicked("a thread").into()))?);
        }
        Ok(all)
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn the_order_stays_and_the_first_error_counts() {
        let items: Vec<usize> = (0..1000).collect();
        for workers in [1, 3, 64] {
            assert_eq!(
                map(&items, workers, |i| Ok::<_, Error>(i + 1)).unwrap(),
                (1..=1000).collect::<Vec<_>>()
            );
            let odd = |i: &usize| match i {
                7 | 900 => Err(Error::invalid(i.to_string(), "odd")),
                _ => Ok(()),
            };
            assert!(map(&items, workers, odd).unwrap_err().to_string().contains('7'));
        }
        assert_eq!(map(&[] as &[u8], 4, |_| Ok::<_, Error>(())).unwrap(), []);
        assert_eq!(spread(&[7, 8], 4, |i| Ok::<_, Error>(i + 1)).unwrap(), [8, 9]);
    }
}
