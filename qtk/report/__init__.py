"""Results for people: tables, and the numbers behind them."""
