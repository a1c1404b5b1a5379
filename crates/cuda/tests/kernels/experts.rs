//! Mixtures of experts: routes, rows on their way, and products of ragged groups.

use super::device::{Buffer, NULL, ULP, both_orders, close, dtypes, float, launch, values, wide};
use trainyard_cuda::kernels::{self, Argument, Float};
use trainyard_tensor::cpu::experts::{Gate, Router};
use trainyard_tensor::reference::experts as oracle;

fn int(n: usize) -> Argument {
    Argument::I32(n as i32)
}

const GATES: [Gate; 2] = [Gate::Softmax, Gate::Sigmoid];

/// Logits in [-4, 4).
fn logits(seed: u64, len: usize) -> Vec<f32> {
    values::<f32>(seed, len).iter().map(|x| 4.0 * x).collect()
}

struct Chosen {
    experts: Vec<i32>,
    weights: Vec<f32>,
}

fn choose<T: trainyard_tensor::Element>(router: &Router, logits: &[f32], bias: &[T]) -> Chosen {
    let (count, k) = (router.experts, router.top_k);
    let tokens = logits.len() / count;
    let (experts, weights) = both_orders(|| {
        let (logits, bias) = (Buffer::new(logits), Buffer::new(bias));
        let (experts, weights) = (Buffer::<i32>::empty(tokens * k), Buffer::<f32>::empty(tokens * k));
        let pointers = [logits.at(), bias.at(), experts.at(), weights.at()];
        let gate = int(usize::from(router.gate == Gate::Sigmoid));
        let last = [gate, int(usize::from(router.normalise)), Argument::F32(router.scale)];
        let arguments = [&pointers[..], &[int(tokens), int(count), int(k)], &last].concat();
        launch(&kernels::ROUTE_CHOOSE, float::<T>(), [tokens, 1, 1], &arguments);
        (experts.get(), weights.get().iter().map(|weight| weight.to_bits()).collect::<Vec<_>>())
    });
    Chosen { experts, weights: weights.into_iter().map(f32::from_bits).collect() }
}

dtypes! {
    fn tokens_go_to_their_best_experts<T>() {
        for (gate, (tokens, count, k), normalise) in [
            (GATES[0], (1, 1, 1), true), (GATES[0], (9, 8, 2), true), (GATES[1], (7, 64, 6), false), (GATES[0], (5, 131, 131), false),
        ] {
            let router = Router { experts: count, top_k: k, gate, normalise, scale: 1.5 };
            let (logits, bias) = (logits(1, tokens * count), values::<T>(2, count));
            let bias: Vec<T> = bias.iter().map(|b| T::from_f32(b.to_f32() * 0.25)).collect();
            let Chosen { experts, weights } = choose(&router, &logits, &bias);
            for token in 0..tokens {
                let of_token: Vec<f64> = logits[token * count..][..count].iter().map(|l| f64::from(*l)).collect();
                let want = oracle::choose(&router, &of_token, &wide(&bias));
                let got: Vec<usize> = experts[token * k..][..k].iter().map(|e| *e as usize).collect();
                assert_eq!(got, want, "token {token} of {count} experts");
                // Sums of 131 terms at most, an exponential of an argument below 8.
                close("weights", &weights[token * k..][..k], &oracle::weights(&router, &of_token, &want), 300.0 * ULP);
            }
        }
    }
}

#[test]
fn equal_scores_go_to_the_first_experts_and_what_is_no_number_comes_last() {
    let router = Router { experts: 40, top_k: 3, gate: Gate::Sigmoid, normalise: false, scale: 1.0 };
    let mut logits = vec![0.5f32; 3 * 40];
    // The second token has numbers for two experts, the third for none.
    logits[40..].fill(f32::NAN);
    (logits[40 + 7], logits[40 + 33]) = (-1.0, 2.0);
    let experts = choose(&router, &logits, &[0.0f32; 40]).experts;
    assert_eq!(experts, [0, 1, 2, 33, 7, 0, 0, 1, 2]);
}

#[test]
fn rows_are_sorted_by_expert_in_the_order_of_tokens() {
    for (tokens, count, k, capacity) in [(1, 1, 1, 5), (300, 7, 2, 1000), (300, 7, 2, 60), (130, 40, 3, 2)] {
        // The last expert is chosen by nobody.
        let of = |at: usize| ((at * 2_654_435_761) >> 7) % (count - 1).max(1);
        let experts: Vec<i32> = (0..tokens * k).map(|at| of(at) as i32).collect();
        let (counts, places, order, bounds) = both_orders(|| {
            let list = Buffer::new(&experts);
            let ints = Buffer::<i32>::empty;
            let (counts, places, order, bounds) = (ints(count), ints(tokens * k), ints(tokens * k), ints(count + 1));
            let sizes = [1, count, 1];
            launch(&kernels::EXPERT_COUNTS, Float::F32, sizes, &[list.at(), counts.at(), int(tokens * k)]);
            let pointers = [list.at(), counts.at(), places.at(), order.at(), bounds.at()];
            let arguments = [&pointers[..], &[tokens * k, count, k, capacity].map(int)].concat();
            launch(&kernels::EXPERT_PLACES, Float::F32, sizes, &arguments);
            (counts.get(), places.get(), order.get(), bounds.get())
        });
        let mut want = vec![Vec::new(); count];
        for (choice, expert) in experts.iter().enumerate() {
            want[*expert as usize].push(choice);
        }
        let (mut row, mut kept) = (0, vec![-1; tokens * k]);
        for (expert, choices) in want.iter().enumerate() {
            assert_eq!((counts[expert], bounds[expert]), (choices.len() as i32, row), "expert {expert}");
            for choice in choices.iter().take(capacity) {
                assert_eq!(order[row as usize], (choice / k) as i32);
                kept[*choice] = row;
                row += 1;
            }
        }
        assert_eq!((bounds[count], &places), (row, &kept));
        assert!(order[row as usize..].iter().all(|token| *token == -1));
    }
}

/// The loss whose gradient the kernel gives, in f64: `dweights . weights + auxiliary A + z Z`.
fn loss(
    router: &Router,
    logits: &[f64],
    chosen: &[i32],
    counts: &[i32],
    dweights: &[f32],
    [auxiliary, z]: [f64; 2],
) -> f64 {
    let (count, k) = (router.experts, router.top_k);
    let of_token = |(token, logits): (usize, &[f64])| {
        let experts: Vec<usize> = chosen[token * k..][..k].iter().map(|e| *e as usize).collect();
        let weights = oracle::weights(router, logits, &experts);
        weights.iter().zip(&dweights[token * k..]).map(|(w, d)| w * f64::from(*d)).sum::<f64>()
    };
    let (a, b) = oracle::balance(router, logits, counts);
    logits.chunks(count).enumerate().map(of_token).sum::<f64>() + auxiliary * a + z * b
}

#[test]
fn the_gradient_of_logits_is_that_of_weights_and_balance_losses() {
    for (gate, normalise, (tokens, count, k), factors) in [
        (GATES[0], true, (3, 5, 2), [0.0, 0.0]),
        (GATES[0], false, (4, 40, 3), [0.7, 0.3]),
        (GATES[1], true, (3, 6, 2), [0.5, 0.0]),
        (GATES[1], false, (2, 33, 4), [0.4, 0.6]),
    ] {
        let router = Router { experts: count, top_k: k, gate, normalise, scale: 1.25 };
        let logits = logits(3, tokens * count);
        let Chosen { experts, .. } = choose(&router, &logits, &vec![0.0f32; count]);
        let mut counts = vec![0; count];
        experts.iter().for_each(|expert| counts[*expert as usize] += 1);
        let dweights = values::<f32>(4, tokens * k);
        let (got, terms) = both_orders(|| {
            let (l, e, c, d) =
                (Buffer::new(&logits), Buffer::new(&experts), Buffer::new(&counts), Buffer::new(&dweights));
            let (dlogits, terms) = (Buffer::<f32>::empty(tokens * count), Buffer::<f32>::empty(2 * tokens));
            let gate = int(usize::from(gate == Gate::Sigmoid));
            let sizes = [int(tokens), int(count), int(k), gate, int(usize::from(normalise))];
            let last = [1.25, factors[0] as f32, factors[1] as f32].map(Argument::F32);
            let arguments = [&[l.at(), e.at(), c.at(), d.at(), dlogits.at()][..], &sizes, &last].concat();
            launch(&kernels::ROUTE_BACKWARD, Float::F32, [tokens, 1, 1], &arguments);
            let arguments = [l.at(), c.at(), terms.at(), int(tokens), int(count), gate];
            launch(&kernels::BALANCE_TERMS, Float::F32, [tokens, 1, 1], &arguments);
            (dlogits.get(), terms.get())
        });
        let wide: Vec<f64> = logits.iter().map(|l| f64::from(*l)).collect();
        for at in 0..got.len() {
            let moved = |by: f64| {
                let mut logits = wide.clone();
                logits[at] += by;
                loss(&router, &logits, &experts, &counts, &dweights, factors)
            };
            let want = (moved(1e-5) - moved(-1e-5)) / 2e-5;
            assert!((f64::from(got[at]) - want).abs() < 2e-6, "{gate:?}, logit {at}: {}, not {want}", got[at]);
        }
        let (auxiliary, z) = oracle::balance(&router, &wide, &counts);
        let sums = [0, 1].map(|row| terms[row * tokens..][..tokens].iter().map(|x| f64::from(*x)).sum::<f64>());
        let n = tokens as f64;
        assert!((sums[0] * count as f64 / n / n - auxiliary).abs() < 1e-5 * auxiliary, "{gate:?}");
        assert!((sums[1] / n - z).abs() < 1e-5 * z, "{gate:?}");
    }
}

#[test]
fn excess_is_what_is_beyond_the_mean() {
    let counts = [4, 0, 7, 1, 3];
    let (counts_at, excess) = (Buffer::new(&counts), Buffer::new(&[1.0f32; 5]));
    // The mean is 3, the unit a half.
    for (add, want) in [(1, [1.5, -0.5, 3.0, 0.0, 1.0]), (0, [0.5, -1.5, 2.0, -1.0, 0.0])] {
        let arguments = [counts_at.at(), excess.at(), int(5), Argument::F32(0.5), Argument::I32(add)];
        launch(&kernels::EXPERT_EXCESS, Float::F32, [1, 1, 1], &arguments);
        assert_eq!(excess.get(), want);
    }
}

/// Places of `tokens` tokens with two choices each; every fifth choice is dropped.
fn places(tokens: usize) -> Vec<i32> {
    let kept: Vec<usize> = (0..2 * tokens).filter(|choice| choice % 5 != 3).collect();
    let mut places = vec![-1; 2 * tokens];
    for (at, choice) in kept.iter().enumerate() {
        places[*choice] = (kept.len() - 1 - at) as i32;
    }
    places
}

dtypes! {
    fn rows_go_and_come_back<T>() {
        for (tokens, dim) in [(1, 1), (13, 24), (6, 601)] {
            let places = places(tokens);
            let rows = 2 * tokens;
            let mut order = vec![-1; rows];
            places.iter().enumerate().filter(|(_, place)| **place >= 0).for_each(|(c, place)| order[*place as usize] = (c / 2) as i32);
            let (x, out, weights) = (values::<T>(1, tokens * dim), values::<T>(2, rows * dim), values::<f32>(3, rows));
            let zeros = vec![T::from_f32(0.0); rows * dim];
            let (gathered, y, plain, drows, dweights) = both_orders(|| {
                let t = float::<T>();
                let (x, out, weights) = (Buffer::new(&x), Buffer::new(&out), Buffer::new(&weights));
                let (order, places) = (Buffer::new(&order), Buffer::new(&places));
                let gathered = Buffer::<T>::empty(rows * dim);
                // Rows are read like those of a table.
                let sizes = [rows, dim, 0, tokens, 0].map(int);
                let arguments = [&[order.at(), x.at(), NULL, NULL, gathered.at()][..], &sizes].concat();
                launch(&kernels::EMBEDDING, t, [rows * dim, 1, 1], &arguments);
                let combine = |weights: Argument, residual: Argument| {
                    let y = Buffer::<T>::empty(tokens * dim);
                    let sizes = [int(tokens), int(2), int(dim)];
                    let arguments = [&[out.at(), places.at(), weights, residual, y.at()][..], &sizes].concat();
                    launch(&kernels::COMBINE_ROWS, t, [tokens, dim, 1], &arguments);
                    y.get()
                };
                let (y, plain) = (combine(weights.at(), x.at()), combine(NULL, NULL));
                let (drows, dweights) = (Buffer::new(&zeros), Buffer::<f32>::empty(rows));
                let pointers = [x.at(), out.at(), places.at(), weights.at(), drows.at(), dweights.at()];
                let arguments = [&pointers[..], &[int(tokens), int(2), int(dim)]].concat();
                launch(&kernels::COMBINE_ROWS_BACKWARD, t, [tokens, dim, 1], &arguments);
                (gathered.get(), y, plain, drows.get(), dweights.get())
            });
            let (x, out) = (wide(&x), wide(&out));
            for row in 0..rows {
                let want: Vec<f64> = match usize::try_from(order[row]) {
                    Ok(token) => x[token * dim..][..dim].to_vec(),
                    Err(_) => vec![0.0; dim],
                };
                close("gathered", &gathered[row * dim..][..dim], &want, 0.0);
                let choice = places.iter().position(|place| *place == row as i32);
                let factor = choice.map_or(0.0, |choice| f64::from(weights[choice]));
                let want: Vec<f64> = want.iter().map(|v| factor * v).collect();
                close("drows", &drows[row * dim..][..dim], &want, ULP);
            }
            for token in 0..tokens {
                let of = |choice: usize, column: usize| match usize::try_from(places[choice]) {
                    Ok(place) => out[place * dim + column],
                    Err(_) => 0.0,
                };
                let weight = |choice: usize| f64::from(weights[choice]);
                let sum = |column: usize| (2 * token..2 * token + 2).map(|c| weight(c) * of(c, column)).sum::<f64>();
                let want: Vec<f64> = (0..dim).map(|column| x[token * dim + column] + sum(column)).collect();
                close("y", &y[token * dim..][..dim], &want, 6.0 * ULP);
                let want: Vec<f64> = (0..dim).map(|column| of(2 * token, column) + of(2 * token + 1, column)).collect();
                close("plain", &plain[token * dim..][..dim], &want, 3.0 * ULP);
                for choice in 2 * token..2 * token + 2 {
                    let want: f64 = (0..dim).map(|column| x[token * dim + column] * of(choice, column)).sum();
                    // Chains of dim / 32 and eight halves, of sums below dim.
                    let n = dim as f64;
                    close("dweight", &dweights[choice..=choice], &[want], (n / 8.0 + 10.0) * n * ULP);
                }
            }
        }
    }
}

/// Bounds of groups, rows, n, k, weights: groups of none and of one row, that end inside tiles, of
/// several sources; rows behind the last bound; sizes that tensor cores load in pieces of eight,
/// and others.
const PRODUCTS: [(&[i32], usize, usize, usize, usize); 5] = [
    (&[0, 1], 1, 1, 1, 1),
    (&[0, 5, 5, 17], 20, 24, 40, 3),
    (&[0, 130, 131, 300], 301, 136, 16, 3),
    (&[0, 3, 9, 9, 20], 20, 7, 33, 2),
    (&[0, 0, 0], 9, 10, 64, 2),
];

dtypes! {
    fn groups_of_rows_are_multiplied_by_their_weights<T>() {
        for (bounds, rows, n, k, weights) in PRODUCTS {
            let groups = bounds.len() - 1;
            let (x, w, dy) = (values::<T>(1, rows * k), values::<T>(2, weights * n * k), values::<T>(3, rows * n));
            let sources = groups / weights;
            let (y, dx, dw) = both_orders(|| {
                let (t, bounds) = (float::<T>(), Buffer::new(bounds));
                let (x, w, dy) = (Buffer::new(&x), Buffer::new(&w), Buffer::new(&dy));
                let (y, dx) = (Buffer::<T>::empty(rows * n), Buffer::<T>::empty(rows * k));
                let sizes = [rows, n, k, groups, weights].map(int);
                let arguments = [&[x.at(), w.at(), bounds.at(), y.at()][..], &sizes].concat();
                launch(&kernels::RAGGED_LINEAR, t, [rows, n, groups], &arguments);
                let arguments = [&[dy.at(), w.at(), bounds.at(), dx.at()][..], &sizes].concat();
                launch(&kernels::RAGGED_INPUT_GRADIENT, t, [rows, k, groups], &arguments);
                let dw = Buffer::<f32>::empty(weights * n * k);
                for source in 0..sources {
                    let Argument::Pointer(first) = bounds.at() else { unreachable!() };
                    let bounds = Argument::Pointer(first + 4 * (source * weights) as u64);
                    let sizes = [int(n), int(k), int(weights), int(usize::from(source > 0))];
                    let arguments = [&[dy.at(), x.at(), bounds, dw.at()][..], &sizes].concat();
                    launch(&kernels::RAGGED_WEIGHT_GRADIENT, t, [n, k, weights], &arguments);
                }
                (y.get(), dx.get(), dw.get())
            });
            let (x, w, dy) = (wide(&x), wide(&w), wide(&dy));
            let mut want = vec![0.0; weights * n * k];
            for row in 0..rows {
                let group = (0..groups).find(|g| (bounds[*g]..bounds[g + 1]).contains(&(row as i32)));
                let weight = |i: usize, j: usize| group.map_or(0.0, |group| w[(group % weights * n + i) * k + j]);
                let of_y: Vec<f64> = (0..n).map(|i| (0..k).map(|j| weight(i, j) * x[row * k + j]).sum()).collect();
                close("y", &y[row * n..][..n], &of_y, (k * k) as f64 * ULP);
                let of_dx: Vec<f64> = (0..k).map(|j| (0..n).map(|i| weight(i, j) * dy[row * n + i]).sum()).collect();
                close("dx", &dx[row * k..][..k], &of_dx, (n * n) as f64 * ULP);
                for (i, j) in (0..n).flat_map(|i| (0..k).map(move |j| (i, j))) {
                    if let Some(group) = group {
                        want[(group % weights * n + i) * k + j] += dy[row * n + i] * x[row * k + j];
                    }
                }
            }
            close("dw", &dw, &want, (rows * rows) as f64 * ULP);
        }
    }
}
