"""Matrix products that a rule computes in another way than the operator: in FP8, and with float32 results.

Importing this package registers them in `policy.rules.PRODUCT_RULES`. The packages below do not import it.

- `float32_output`: `Rule.LOWER_FLOAT32_OUT`;
- `float8`: the FP8 rules, by the recipes of `float8_recipes`, with torch's product of FP8 matrices (`float8_matmul`);
- `float8_layers` lists the linear layers of a model that FP8 rules apply to.
"""

from ampkit.matmul import float8, float32_output
from ampkit.matmul.float8_layers import float8_layers
from ampkit.matmul.float8_recipes import PRODUCTS, RECIPES
from ampkit.policy.rules import PRODUCT_RULES, ProductRule, Rule

__all__ = ["float8_layers"]

PRODUCT_RULES[Rule.LOWER_FLOAT32_OUT] = ProductRule(
    float32_output.OPERATORS, "form with a float32 result", float32_output.prepare
)
for _rule in RECIPES:
    PRODUCT_RULES[_rule] = ProductRule(tuple(PRODUCTS), "FP8 form", float8.prepare)
