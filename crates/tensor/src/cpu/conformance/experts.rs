//! Routing, gathering and combining of a mixture of experts.

use super::{ULP, close, dot, dtypes, is_gradient, on_every_cpu, values, wide};
use crate::cpu::experts::*;
use crate::reference::experts as oracle;

fn routers() -> Vec<Router> {
    let mut all = Vec::new();
    for (experts, top_k) in [(1, 1), (3, 2), (8, 2), (17, 5), (64, 8)] {
        for gate in [Gate::Softmax, Gate::Sigmoid] {
            for normalise in [false, true] {
                all.push(Router { experts, top_k, gate, normalise, scale: if normalise { 1.0 } else { 2.5 } });
            }
        }
    }
    all
}

struct Routed {
    experts: Vec<i32>,
    weights: Vec<f32>,
}

fn choose_all(cpu: &crate::cpu::Cpu, router: &Router, logits: &[f32], bias: Option<&[f32]>) -> Routed {
    let choices = logits.len() / router.experts * router.top_k;
    let mut routed = Routed { experts: vec![-7; choices], weights: vec![f32::NAN; choices] };
    choose(cpu, router, logits, bias, Choices { experts: &mut routed.experts, weights: &mut routed.weights });
    routed
}

#[test]
fn choices_and_weights_are_those_of_the_oracle() {
    for router in routers() {
        for (tokens, with_bias) in [(0, false), (1, true), (7, false), (501, true)] {
            let logits: Vec<f32> = values::<f32>(1, tokens * router.experts).iter().map(|l| 3.0 * l).collect();
            let bias: Vec<f32> = values(2, router.experts);
            let bias = with_bias.then_some(&bias[..]);
            let wide_bias = bias.map_or(vec![0.0; router.experts], wide);
            on_every_cpu(
                |cpu| {
                    let Routed { experts, weights } = choose_all(cpu, &router, &logits, bias);
                    (experts, weights.iter().map(|w| w.to_bits()).collect::<Vec<_>>())
                },
                |isa, (experts, weights)| {
                    let logits = wide(&logits);
                    let rows = logits.chunks_exact(router.experts);
                    for (token, (logits, got)) in rows.zip(experts.chunks_exact(router.top_k)).enumerate() {
                        let want = oracle::choose(&router, logits, &wide_bias);
                        let got: Vec<usize> = got.iter().map(|e| *e as usize).collect();
                        assert_eq!(got, want, "{isa} {router:?} token {token}");
                        let weights = &weights[token * router.top_k..(token + 1) * router.top_k];
                        let weights: Vec<f32> = weights.iter().map(|bits| f32::from_bits(*bits)).collect();
                        // An exponential, a sum of 64 and two divisions, of numbers up to 2.5.
                        close(isa, "weights", &weights, &oracle::weights(&router, logits, &want), 2.5 * 70.0 * ULP);
                    }
                },
            );
        }
    }
}

#[test]
fn of_equal_scores_the_first_experts_are_chosen_and_scores_that_are_no_numbers_give_distinct_ones() {
    let router = Router { experts: 4, top_k: 3, gate: Gate::Softmax, normalise: true, scale: 1.0 };
    let logits = [0.0, 1.0, 0.0, 1.0, f32::NAN, 1.0, 2.0, 3.0];
    on_every_cpu(
        |cpu| choose_all(cpu, &router, &logits, None).experts,
        |_, experts| {
            assert_eq!(experts[..3], [1, 3, 0]);
            let mut last = experts[3..].to_vec();
            last.sort_unstable();
            last.dedup();
            assert_eq!(last.len(), 3, "a token goes to an expert once");
        },
    );
}

#[test]
fn gradients_of_logits_are_slopes_of_weights_and_of_balance_losses() {
    for router in routers() {
        let tokens = 5;
        let logits: Vec<f32> = values::<f32>(3, tokens * router.experts).iter().map(|l| 2.0 * l).collect();
        let dweights: Vec<f32> = values(4, tokens * router.top_k);
        for factors in [BalanceFactors::default(), BalanceFactors { auxiliary: 0.5, z: 0.25 }] {
            on_every_cpu(
                |cpu| {
                    let Routed { experts, .. } = choose_all(cpu, &router, &logits, None);
                    let counts = counts(&router, &experts);
                    let mut dlogits = vec![f32::NAN; logits.len()];
                    let dweights = Some(&dweights[..]);
                    choose_backward(cpu, &router, &logits, &experts, &counts, dweights, factors, &mut dlogits);
                    (experts, dlogits)
                },
                |isa, (experts, dlogits)| {
                    let counts = counts(&router, experts);
                    let losses = balance_losses(&router, &logits, &counts);
                    let (auxiliary, z) = oracle::balance(&router, &wide(&logits), &counts);
                    close(isa, "losses", &[losses.auxiliary, losses.z], &[auxiliary, z], 1e-5 * (1.0 + z));
                    let f = |logits: &[f64]| {
                        let mut sum = 0.0;
                        for (token, logits) in logits.chunks_exact(router.experts).enumerate() {
                            let span = token * router.top_k..(token + 1) * router.top_k;
                            let chosen: Vec<usize> = experts[span.clone()].iter().map(|e| *e as usize).collect();
                            sum += dot(&oracle::weights(&router, logits, &chosen), &wide(&dweights[span]));
                        }
                        let (auxiliary, z) = oracle::balance(&router, logits, &counts);
                        sum + f64::from(factors.auxiliary) * auxiliary + f64::from(factors.z) * z
                    };
                    is_gradient(&format!("{isa} {router:?}"), &wide(&logits), &wide(dlogits), f);
                },
            );
        }
    }
}

fn counts(router: &Router, experts: &[i32]) -> Vec<i32> {
    let mut counts = vec![0; router.experts];
    experts.iter().for_each(|e| counts[*e as usize] += 1);
    counts
}

/// Places, tokens, bounds and counts.
fn sorted(experts: &[i32], count: usize, top_k: usize, capacity: Option<usize>) -> [Vec<i32>; 4] {
    let n = experts.len();
    let [mut places, mut tokens, mut bounds, mut counts] = [vec![7; n], vec![7; n], vec![7; count + 1], vec![7; count]];
    let order = Order { places: &mut places, tokens: &mut tokens, bounds: &mut bounds, counts: &mut counts };
    sort(experts, top_k, capacity, order);
    [places, tokens, bounds, counts]
}

#[test]
fn rows_are_sorted_by_expert_and_stay_in_the_order_of_tokens() {
    let [places, tokens, bounds, counts] = sorted(&[3, 0, 0, 3, 1, 3], 4, 2, None);
    assert_eq!(bounds, [0, 2, 3, 3, 6]);
    assert_eq!(counts, [2, 1, 0, 3]);
    assert_eq!(places, [3, 0, 1, 4, 2, 5]);
    assert_eq!(tokens, [0, 1, 2, 0, 1, 2]);
    let [places, tokens, bounds, counts] = sorted(&[3, 0, 0, 3, 1, 3], 4, 2, Some(1));
    assert_eq!(bounds, [0, 1, 2, 2, 3]);
    assert_eq!(counts, [2, 1, 0, 3]);
    assert_eq!(places, [2, 0, -1, -1, 1, -1]);
    assert_eq!(tokens, [0, 2, 0, -1, -1, -1]);
    assert_eq!(sorted(&[], 2, 2, None)[2], [0, 0, 0]);
}

dtypes! {
    fn rows_are_gathered_and_combined<T>() {
        for (tokens, experts, top_k, dim, capacity) in
            [(0, 4, 2, 5, None), (1, 3, 3, 1, None), (9, 5, 2, 17, Some(2)), (301, 8, 2, 129, None), (64, 16, 4, 70, Some(9))]
        {
            let router = Router { experts, top_k, gate: Gate::Softmax, normalise: true, scale: 1.0 };
            let logits: Vec<f32> = values(5, tokens * experts);
            let choices = choose_all(&crate::cpu::Cpu::new(crate::cpu::Isa::Portable, 1), &router, &logits, None);
            let [places, order, bounds, _] = sorted(&choices.experts, experts, top_k, capacity);
            let (rows, kept) = (tokens * top_k, *bounds.last().unwrap() as usize);
            let x: Vec<T> = values(6, tokens * dim);
            let y: Vec<T> = values(7, rows * dim);
            let dy: Vec<T> = values(8, tokens * dim);
            let residual: Vec<T> = values(9, tokens * dim);
            let weights = &choices.weights;
            on_every_cpu(
                |cpu| {
                    let (mut gathered, mut sums) = (vec![T::from_f32(9.0); rows * dim], vec![T::default(); tokens * dim]);
                    let mut plain = sums.clone();
                    let (mut drows, mut dweights) = (vec![T::from_f32(9.0); rows * dim], vec![f32::NAN; rows]);
                    gather_rows(cpu, dim, &x, &order, &mut gathered);
                    combine(cpu, dim, &y, &places, Some(weights), Some(&residual), &mut sums);
                    combine(cpu, dim, &y, &places, None, None, &mut plain);
                    combine_backward(cpu, dim, &dy, &y, &places, weights, &mut drows, &mut dweights);
                    (gathered, sums, plain, drows, dweights)
                },
                |isa, (gathered, sums, plain, drows, dweights)| {
                    let (x, y, dy, residual) = (wide(&x), wide(&y), wide(&dy), wide(&residual));
                    let want = |row: usize| match usize::try_from(order[row]) {
                        Ok(token) => x[token * dim..(token + 1) * dim].to_vec(),
                        Err(_) => vec![0.0; dim],
                    };
                    close(isa, "gathered", gathered, &(0..rows).flat_map(want).collect::<Vec<_>>(), 0.0);
                    let (mut want_sums, mut want_plain) = (residual.clone(), vec![0.0; tokens * dim]);
                    let (mut want_drows, mut want_dweights) = (vec![9.0; rows * dim], vec![0.0; rows]);
                    for choice in 0..rows {
                        let Ok(place) = usize::try_from(places[choice]) else { continue };
                        let (token, weight) = (choice / top_k, f64::from(weights[choice]));
                        for i in 0..dim {
                            want_sums[token * dim + i] += weight * y[place * dim + i];
                            want_plain[token * dim + i] += y[place * dim + i];
                            want_drows[place * dim + i] = weight * dy[token * dim + i];
                            want_dweights[choice] += dy[token * dim + i] * y[place * dim + i];
                        }
                    }
                    let roundings = (top_k + 2) as f64;
                    close(isa, "sums", sums, &want_sums, roundings * (top_k + 1) as f64 * ULP);
                    close(isa, "plain sums", plain, &want_plain, roundings * (top_k + 1) as f64 * ULP);
                    close(isa, "drows", drows, &want_drows, 2.0 * ULP);
                    close(isa, "dweights", dweights, &want_dweights, (dim * (dim + 2)) as f64 * ULP);
                    assert!(kept <= rows);
                },
            );
        }
    }
}
