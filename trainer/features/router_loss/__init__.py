"""A loss that balances the experts of sparse models (`train.router_loss`)."""
