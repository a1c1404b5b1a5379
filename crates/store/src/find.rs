//! Finds objects: by name, by pattern, and below a prefix.

use std::path::PathBuf;
use std::sync::Arc;

use futures_util::{FutureExt, StreamExt, TryStreamExt};
use glob::{MatchOptions, Pattern};
use object_store::path::Path as Key;

use crate::address::{Address, Scheme, expand_braces, printable};
use crate::error::StoreError;
use crate::fetch::{repeated, store_fault};
use crate::object::{Inner, Object};
use crate::remote::{Remote, about, look};
use crate::{Store, wait};

/// Objects that are looked at simultaneously.
const LOOKS: usize = 32;

/// A listing may take as long as this many requests that are barely fast enough.
const PAGES: u32 = 20;

impl Store {
    /// The objects that `url` stands for, in the order of their names.
    ///
    /// `{000..099}` and `{a,b}` stand for each of their parts, in this order. In buckets `*`, `?`,
    /// `[abc]` and `**` match names as in paths, and a URL that ends with `/` stands for all
    /// objects below it.
    ///
    /// # Errors
    /// An object does not exist or is refused, a pattern matches nothing, or requests fail again
    /// and again.
    pub fn find(&self, url: &str) -> Result<Vec<Object>, StoreError> {
        let mut addresses = Vec::new();
        for url in expand_braces(url)? {
            addresses.push(Address::parse(&url)?);
        }
        if let Some(first) = addresses.iter().find(|a| a.scheme == Scheme::Http && a.is_pattern()) {
            let fix = "name each file, or write {000..099} for numbers";
            return Err(StoreError::new(first.name(), "an HTTP server cannot be asked for a list of files", fix));
        }
        let store = self.clone();
        let found = wait(&printable(url), async move {
            let each = addresses.into_iter().map(|address| {
                let store = store.clone();
                async move {
                    match address.is_pattern() {
                        true => listed(&store, &address).await,
                        false => named(&store, address).await.map(|object| vec![object]),
                    }
                }
            });
            futures_util::stream::iter(each).buffered(LOOKS).try_collect::<Vec<_>>().await
        })?;
        Ok(found.into_iter().flatten().collect())
    }

    /// The object that is called exactly `url`; None if there is none.
    ///
    /// # Errors
    /// It is refused for another reason than that it is not there.
    pub fn find_one(&self, url: &str) -> Result<Object, StoreError> {
        let (store, address) = (self.clone(), Address::parse(url)?);
        wait(&printable(url), async move { named(&store, address).await })
    }
}

async fn named(store: &Store, address: Address) -> Result<Object, StoreError> {
    let name = address.name();
    let look = || {
        let (store, address) = (store.clone(), address.clone());
        async move { look(&store, &address).await }.boxed()
    };
    let (remote, about) = repeated(store, &name, store.options().inactivity, look).await?;
    Ok(Object(Arc::new(Inner { store: store.clone(), remote, scheme: address.scheme, name, about })))
}

/// The objects that match a pattern.
async fn listed(store: &Store, address: &Address) -> Result<Vec<Object>, StoreError> {
    let name = address.name();
    let bucket = store.bucket(address)?;
    let first_wildcard = address.key.find(['*', '?', '[']).unwrap_or(address.key.len());
    let (folder, rest) = match address.key[..first_wildcard].rfind('/') {
        Some(slash) => address.key.split_at(slash + 1),
        None => ("", address.key.as_str()),
    };
    let pattern = Pattern::new(&address.key).map_err(|error| {
        let fix = "write * for any characters, ? for one, [abc] for one of them, ** for any folders";
        StoreError::new(&name, format!("is not a pattern of names ({error})"), fix)
    })?;
    let prefix = Key::parse(folder)
        .map_err(|error| StoreError::new(&name, format!("is no valid name of an object ({error})"), "check the URL"))?;
    let prefix = (!folder.is_empty()).then_some(prefix);
    let is_flat = !rest.is_empty() && !rest.contains('/') && !rest.contains("**");
    let list = || {
        let (bucket, prefix, name, scheme) = (bucket.clone(), prefix.clone(), name.clone(), address.scheme);
        async move {
            let listed = match is_flat {
                true => bucket.list_with_delimiter(prefix.as_ref()).await.map(|listing| listing.objects),
                false => bucket.list(prefix.as_ref()).try_collect::<Vec<_>>().await,
            };
            listed.map_err(|error| store_fault(&name, scheme, &error))
        }
        .boxed()
    };
    let metas = repeated(store, &name, store.options().inactivity * PAGES, list).await?;
    let options = MatchOptions { require_literal_separator: true, ..MatchOptions::new() };
    let is_wanted = |key: &str| rest.is_empty() || pattern.matches_with(key, options);
    let mut objects: Vec<Object> = metas
        .iter()
        // Stores show folders that a browser made as objects without content.
        .filter(|meta| is_wanted(meta.location.as_ref()) && !meta.location.as_ref().ends_with('/'))
        .map(|meta| {
            let name = format!("{}/{}", address.bucket, meta.location);
            let remote = Remote::Bucket { store: bucket.clone(), key: meta.location.clone() };
            Object(Arc::new(Inner { store: store.clone(), remote, scheme: address.scheme, name, about: about(meta) }))
        })
        .collect();
    if objects.is_empty() {
        return Err(StoreError::new(
            name,
            "matches no object",
            "check the bucket and the pattern, and quote it in a shell",
        ));
    }
    // The order in which a folder of files is walked: by the parts of names.
    objects.sort_by_cached_key(|object| PathBuf::from(&object.0.name));
    Ok(objects)
}
