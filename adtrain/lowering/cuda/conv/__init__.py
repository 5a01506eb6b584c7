"""Registers the CUDA kernels for convolutions."""

from adtrain.core.kernel import register
from adtrain.core.precision import TERMS, TF32
from adtrain.lowering.cuda.conv import bfloat16, pooling, rules

register("conv2d", "cuda", rules.conv2d)
register("conv2d_input_grad", "cuda", rules.conv2d_input_grad)
register("conv2d_weight_grad", "cuda", rules.conv2d_weight_grad)
register("conv2d_weight_grad_by_image", "cuda", rules.conv2d_weight_grad_by_image)
register("conv2d_weight_grad_by_image_norms", "cuda", rules.image_norms)
register("conv2d_weight_grad_by_image_pooled_norms", "cuda", rules.image_norms)
register("conv2d_weight_grad_by_image_sum", "cuda", rules.conv2d_weight_grad_by_image_sum)
register("conv2d_weight_grad_sum", "cuda", rules.conv2d_weight_grad_sum)
register("conv_pool", "cuda", pooling.conv2d_max_pool2d)
register("conv2d_input_grad_pooled", "cuda", pooling.conv2d_input_grad_pooled)
register("conv2d_weight_grad_pooled", "cuda", pooling.conv2d_weight_grad_pooled)
register("conv2d_weight_grad_by_image_pooled", "cuda", pooling.conv2d_weight_grad_by_image_pooled)
register("conv2d_weight_grad_pooled_sum", "cuda", pooling.conv2d_weight_grad_pooled)
for _format in TERMS:
    register(f"conv2d_{_format}", "cuda", bfloat16.conv2d)
    register(f"conv2d_input_grad_{_format}", "cuda", bfloat16.input_grad)
    if _format != TF32:
        register(f"conv2d_weight_grad_{_format}", "cuda", bfloat16.weight_grad)
