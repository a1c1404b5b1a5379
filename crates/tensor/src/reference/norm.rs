//! Layer norm and RMS norm of one row.

/// `(y, inv_rms)`
pub fn rms_norm(x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, f64) {
    let mean_square = x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64;
    let inv = 1.0 / (mean_square + eps).sqrt();
    (x.iter().zip(weight).map(|(x, w)| x * inv * w).collect(), inv)
}

/// `(dx, dweight)`
pub fn rms_norm_backward(dy: &[f64], x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>) {
    let n = x.len();
    let (_, inv) = rms_norm(x, weight, eps);
    let normal: Vec<f64> = x.iter().map(|x| x * inv).collect();
    let mean = (0..n).map(|i| dy[i] * weight[i] * normal[i]).sum::<f64>() / n as f64;
    let dx = (0..n).map(|i| inv * (dy[i] * weight[i] - normal[i] * mean)).collect();
    (dx, (0..n).map(|i| dy[i] * normal[i]).collect())
}

/// `(y, mean, inv_std)`
pub fn layer_norm(x: &[f64], weight: &[f64], bias: &[f64], eps: f64) -> (Vec<f64>, f64, f64) {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    let inv = 1.0 / (variance + eps).sqrt();
    let y = (0..x.len()).map(|i| (x[i] - mean) * inv * weight[i] + bias[i]).collect();
    (y, mean, inv)
}

/// `(dx, dweight, dbias)`
pub fn layer_norm_backward(dy: &[f64], x: &[f64], weight: &[f64], eps: f64) -> (Vec<f64>, Vec<f64>, Vec<f64>) {
    let n = x.len();
    let (_, mean, inv) = layer_norm(x, weight, &vec![0.0; n], eps);
    let normal: Vec<f64> = x.iter().map(|x| (x - mean) * inv).collect();
    let g: Vec<f64> = (0..n).map(|i| dy[i] * weight[i]).collect();
    let mean_g = g.iter().sum::<f64>() / n as f64;
    let mean_gx = (0..n).map(|i| g[i] * normal[i]).sum::<f64>() / n as f64;
    let dx = (0..n).map(|i| inv * (g[i] - mean_g - normal[i] * mean_gx)).collect();
    (dx, (0..n).map(|i| dy[i] * normal[i]).collect(), dy.to_vec())
}
