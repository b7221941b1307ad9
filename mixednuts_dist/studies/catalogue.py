"""Every study by name, in the order of the paper, with its section and what it shows; costs nothing to import."""

CATALOGUE: dict[str, tuple[str, str]] = {
    "simplex": ("4.4, fig:traj, fig:traj_bar", "What M does to a clear and to a competing prediction"),
    "main": ("5.1, fig:nlmc, tab:efficiency", "std, rob and the mixture, clean and attacked"),
    "error-rate": ("5.1, tab:err_rate", "The mixture's error rates relative to rob's"),
    "margins": ("5.1, fig:conf, tab:margin_hist", "Confidence margins of std, rob, rob+LN and rob+M"),
    "confidence": ("5.2, fig:conf_sota", "Are robust classifiers surer where they are right? Compares --rob"),
    "trade-off": ("5.3, fig:tradeoff_curve", "Measured accuracies for five betas, with and without M (and --rob)"),
    "surrogate": ("B.2.1", "r_d = 0 against 0.9, and what Square then still finds"),
    "bypass": ("B.2.2", "Transfer from f_aux against the gradient bypass"),
    "parameters": ("C.1, tab:spc_candidate", "s, p, c and alpha of every beta, and what they predict"),
    "base-accuracy": ("C.1, tab:base_acc", "h, h-LN and h-M alone: does M cost accuracy?"),
    "efficiency": ("C.2, tab:efficiency, fig:compare", "Parameters and FLOPs beside the accuracy"),
    "sensitivity": ("D.1, fig:sensitivity", "The objective over s and c at every p"),
    "no-transform": ("D.1", "No transformation (Mixed), LayerNorm or GELU only, and M"),
    "clamp": ("D.2, tab:clamp_abla", "Algorithm 1 with each clamping function"),
    "data-size": ("D.3, tab:datasize_abla", "The mixture found on fewer images"),
    "resamples": ("D.3", "How far the choice moves with the images: nested random subsets"),
    "seen-unseen": ("D.3, tab:overfit", "Images that the search saw against others"),
    "temperature": ("D.4, tab:ts_abla", "std at T = 0, 0.5 and 1 at the same clean accuracy"),
    "black-box": ("D.5", "rob without gradients: Square as MMAA, another model's values, a guess"),
    "parameter-transfer": ("D.5, tab:param_trans", "s, p, c of several robust classifiers (--rob)"),
    "base-choice": ("D.6", "Which rob to choose: robust accuracy with a margin (--rob)"),
    "assumptions": ("D.8", "How often assumptions 4.1 and 4.2 fail"),
    "relaxed": ("D.8.3", "The relaxed objective beside the paper's and the exact one"),
    "approximation": ("D.9", "The objective recomputed with perturbations against h-M"),
}


def catalogue_text() -> str:
    """Name, section of the paper and what it shows, a line each."""
    return "\n".join(f"{name:<20}{section:<33}{title}" for name, (section, title) in CATALOGUE.items())
